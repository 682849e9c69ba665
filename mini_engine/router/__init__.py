"""Several engines behind one address: a request goes to the worker that has computed its beginning before.

``policy.py`` decides where, ``tree.py`` is what it believes that a worker holds.
"""
