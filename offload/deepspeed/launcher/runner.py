"""`deepspeed.launcher.runner`: the name of the file in which accelerate leaves environment variables."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
