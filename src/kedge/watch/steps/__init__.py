"""The steps: which events end them, how much each may cost, and the shield that keeps the program safe."""
