"""The section `reward`, with the models that judge and score."""
