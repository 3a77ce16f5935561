"""What a user asks when something is wrong: doctor, start-up report."""
