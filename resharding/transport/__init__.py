"""What executes a plan's copies, one file per way: within a rank, and point to point between ranks."""
