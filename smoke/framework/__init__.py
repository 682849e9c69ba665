"""What every check is made of: the manifest, probes and verdicts, inputs, comparisons, and transformers as a peer."""
