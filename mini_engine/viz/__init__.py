"""Figures of the notebooks: one package per lesson.

In each package ``measure`` computes what ``draw`` draws; further modules hold one subject each. A notebook imports the
package of its lesson and, from this folder:

``figure``      the style, and ``Figure``: a picture with a paragraph that says what it shows
``tokens``      prompts, and printable names of tokens
``difference``  how far two tensors of logits are apart
``peer``        the same checkpoint in transformers
``sliders``     a picture that follows sliders

This is the only part of the project that imports matplotlib: ``pip install mini-engine[notebooks]``.
"""
