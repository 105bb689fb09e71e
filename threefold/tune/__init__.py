"""The loop: a frozen contract, trials that change one variable each, validation, and a ledger of evidence."""
