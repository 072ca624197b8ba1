"""How fast is minivllm beside what a user would pick instead: vLLM, llama.cpp and transformers?"""

from bench.peers.compare import main

main()
