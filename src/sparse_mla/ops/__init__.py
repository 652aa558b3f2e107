"""Operations: check the arguments, choose a body, launch it."""
