"""Exit codes by which a rank tells its agent how it ended. This module does not import torch.

The agent starts all ranks again after a hang, a lost peer or a fault, and gives up after a refusal, which would come
again on every start. The numbers are those of sysexits.h.
"""

REFUSED = 78  # a finding that would come again on every start
HUNG = 75  # the watchdog ended the rank; another start may help
LOST_PEER = 76  # another rank went away first and has the cause
FAULT = 70  # an unexpected error, whose traceback is in the log
