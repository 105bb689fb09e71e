"""What judges an export in Megatron's interpreter.

`validation.py` joins the modules to one file, `validate.py`, in the order verdict, stand_ins, machine, values,
bridge, lm, process. They import Torch and Megatron inside functions only; threefold itself imports `verdict`.
"""
