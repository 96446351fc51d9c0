"""Corpora, tokenizer, packing, order and the synthetic task: nobody else knows about files."""
