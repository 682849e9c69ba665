"""Several engines behind one address: a request goes to the worker that has computed its beginning before.

``policy.py`` decides where, ``tree.py`` is what it believes that a worker holds. ``front.py`` is the application that
clients ask, ``fleet.py`` knows which workers are there, ``reply.py`` is what a client has of an answer. ``workers.py``
says what a worker is, and has those of this process; ``servers.py``, ``replicas.py`` and ``actors.py`` have the others.
"""
