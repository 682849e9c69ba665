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
``grammar_automata``  automata with labels, chains joined, and a place for every state
``grammar_runs``  answers mask by mask, jumps, exact probabilities of a small language, times of backends
``grammar``     L7: automata, the masks of their states, what backends cost
``grammar_charts``  L7: what masks do to distributions and to texts, what jumps save
``grammar_slider``  L7: one step of an answer by hand
``kernels_work``    what operations read, write and compute, and how programs fill a GPU
``kernels_numbers``  sums in blocks and dtypes, the softmax that is corrected as it goes
``kernels_runs``    kernels in the interpreter: bits in batches, passes of a search, places that a mask stores to
``kernels``     L8: what limits an operation, how a decode step fills a GPU
``kernels_charts``  L8: rounding, bits, softmax tile by tile, a search, the places of a mask

This is the only part of the project that imports matplotlib: ``pip install mini-engine[notebooks]``.
"""
