"""What each dimension of a value is: samples, channels or positions, as the operations of a forward show it."""
