"""Exit codes of a rank that its agent reads; from sysexits.h. No torch."""

REFUSED = 78  # a finding: it would come again on every start
HUNG = 75  # the watchdog ended it: worth another try
LONELY = 76  # another rank went away first: look there
FAULT = 70  # an error that nobody foresaw; its traceback is in the log
