"""What the verbs share: parsing arguments, reading a plan from them, standard streams, the terminal, completion."""
