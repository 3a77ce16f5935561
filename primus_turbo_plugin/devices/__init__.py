"""Which device this is and what it can do."""
