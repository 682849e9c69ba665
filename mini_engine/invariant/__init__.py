"""What ``batch_invariant`` rests on: experiments that find how this machine keeps a row's bits apart from its batch."""
