"""Reading AMDGCN assembly text: operands, instructions, programs, kernel descriptors."""
