"""`deepspeed.launcher.runner`: the name of the file in which accelerate leaves environment variables."""

from offload.deepspeed.refused import main as main

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
