"""What the training stages read: token shards, answers, and the states of the target."""
