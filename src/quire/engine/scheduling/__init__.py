"""Which requests run in the next step, and with how many tokens. These modules do not import torch."""
