"""L7: from a JSON Schema to the tree of the JSON texts that are valid under it.

``keywords`` checks what a schema says, and ``reader`` resolves references, branches and ``negation`` into alternatives,
the ``facts``. ``converter`` writes each alternative as a tree, with the spellings of ``values``.
"""
