"""What every Osprey pod shares: artifact store, manifests, checkpoints, sources, stage runner, progress."""
