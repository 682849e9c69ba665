"""Every figure of the notebooks and of the command line, and what is measured to draw them.

``figure``      the style, and ``Figure``: a picture with one paragraph of text
``trace``       recorders at the model's seams and blocks
``difference``  how far two computations are apart
``peer``        the same checkpoint in transformers
``batching``    the same requests in different batches, and what padding costs
``forward``     L1: activations, attention maps, where bits are lost
``paging``      L2: pages, slots, masks, the cost of padding
``tokens``      prompts and printable names of tokens
``distribution``  what a decode decided and what it cost
``decoding``    L3: next-token distributions along a greedy decode
``sampling``    what a sampler does to a distribution, and how often each token then comes
``drawing``     L4: stages, orders, draws, penalties, coloured tokens
``sliders``     L4: the stages by hand, in a notebook program
``serving``     runs of many requests, what their log tells, and a simulation without a model
``scheduling``  L5: who ran when, pages in use, rows of a step, load, a stream
``caching``     a tree event by event, who found what in a cache, runs with the pages that they held
``prefixes``    L6: the tree, orders beside the bound, times and pages with a cache and without

This is the only part of the project that imports matplotlib: ``pip install mini-engine[notebooks]``.
"""
