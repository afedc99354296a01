"""Stands in for six, which Megatron-LM imports for BERT's tokenizer."""
