"""How good a model is: perplexity, few-shot tasks, long context; each figure with its standard error."""
