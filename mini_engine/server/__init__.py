"""The engine behind the HTTP interface of OpenAI: ``create_app`` in ``app.py``, ``serve`` in ``life.py``.

``watch.py`` is the page on which one sees the engine think, ``steps.py`` makes its events.
"""
