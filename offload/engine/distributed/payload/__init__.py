"""What collectives of weights and gradients carry: values, or codes of them."""
