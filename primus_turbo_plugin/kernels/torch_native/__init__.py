"""Backend `torch`: what torch itself does best."""
