"""Several engines behind one address: a request goes to the worker that has computed its beginning before.

``policy.py`` decides where, by the ``tree.py`` of each worker; ``simulation.py`` shows what that is worth.
"""
