"""``mini-engine bench grammar``."""
