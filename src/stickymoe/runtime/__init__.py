"""Generate text inside a byte budget: experts stay on disk, and each layer has a few slots for them in memory."""
