"""The engine behind the HTTP interface of OpenAI: ``create_app`` in ``app.py``, ``serve`` in ``life.py``."""
