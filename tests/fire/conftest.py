from serve.conftest import eventually_fixture, fake_engine, serving_fixture  # noqa: F401
