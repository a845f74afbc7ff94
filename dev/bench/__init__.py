"""``make bench-training``: what the training core costs, beside others' and by itself."""
