"""Every lesson's checks: a folder per lesson, a file per subject, its slow specs next to them (``spec_*.py``)."""
