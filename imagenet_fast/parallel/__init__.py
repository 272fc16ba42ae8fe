"""Several ranks for one network: layers shared out, or activations handed on."""
