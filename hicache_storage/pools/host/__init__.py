"""Host pools of the SDK, in SGLang's layouts."""
