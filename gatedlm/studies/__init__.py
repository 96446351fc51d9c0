"""What ``gatedlm.analyze`` looks into: the sink of models, the spikes of curves."""
