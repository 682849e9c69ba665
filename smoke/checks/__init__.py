"""Every lesson's checks: a folder per lesson, a file per subject, its slow specs beside them (``spec_*.py``)."""
