"""Models that write down what a recording says: an encoder of sound, a decoder of text."""
