"""What exists only for speed on CPUs. Each part stands beside the plain form that proves it."""
