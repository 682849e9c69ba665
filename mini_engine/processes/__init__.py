"""One model in many processes, in plain torch: parts of matrices, what ranks tell each other, which worker is asked."""
