"""What of a machine, a network and a data set would stand in the way of training."""
