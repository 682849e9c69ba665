"""Several engines behind one address: a request goes to the worker that has computed its beginning before.

``policy.py`` decides where, by the ``tree.py`` of each worker; ``simulation.py`` shows what that is worth. ``front.py``
is the application that clients ask, ``fleet.py`` knows which workers are there, ``reply.py`` is what a client has of an
answer. ``workers.py`` says what a worker is and has those of this process. ``servers.py``, ``replicas.py`` and
``actors.py`` have the others.
"""
