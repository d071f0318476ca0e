"""Generated from protos/ by tools/generate_protos.py. Do not edit."""
