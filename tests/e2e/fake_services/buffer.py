"""See the package."""

from tests.e2e.fake_services import live

if __name__ == "__main__":
    live()
