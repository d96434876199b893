"""The bundled tiny checkpoint and the code that trains it."""
