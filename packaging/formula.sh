#!/usr/bin/env bash
# Writes the Homebrew formula of a release, paguro.rb, to standard output.
#
# usage: packaging/formula.sh VERSION SHA256SUMS
set -euo pipefail

if [ $# -ne 2 ]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
version=$1 sums=$2
url=https://github.com/paguro/paguro/releases/download/v$version

# The checksum of the archive of a target.
sum() {
  local found
  found=$(awk -v name="paguro-$version-$1.tar.gz" '$2 == name || $2 == "*" name { print $1 }' "$sums")
  if [ -z "$found" ]; then
    echo "error: $sums has no paguro-$version-$1.tar.gz" >&2
    return 1
  fi
  echo "$found"
}

mac=$(sum aarch64-apple-darwin)
arm=$(sum aarch64-unknown-linux-gnu)
intel=$(sum x86_64-unknown-linux-gnu)

cat <<FORMULA
class Paguro < Formula
  desc "Inference engine and local server for large language models"
  homepage "https://github.com/paguro/paguro"
  version "$version"
  license any_of: ["MIT", "Apache-2.0"]
  head "https://github.com/paguro/paguro.git", branch: "main"

  head do
    depends_on "rust" => :build
  end

  on_macos do
    depends_on arch: :arm64
    url "$url/paguro-$version-aarch64-apple-darwin.tar.gz"
    sha256 "$mac"
  end

  on_linux do
    on_arm do
      url "$url/paguro-$version-aarch64-unknown-linux-gnu.tar.gz"
      sha256 "$arm"
    end
    on_intel do
      url "$url/paguro-$version-x86_64-unknown-linux-gnu.tar.gz"
      sha256 "$intel"
    end
  end

  def install
    if build.head?
      system "cargo", "install", *std_cargo_args(path: "app")
      generate_completions_from_executable(bin/"paguro", "completions")
      (man1/"paguro.1").write Utils.safe_popen_read(bin/"paguro", "man")
    else
      bin.install "paguro"
      bash_completion.install "completions/paguro.bash" => "paguro"
      zsh_completion.install "completions/_paguro"
      fish_completion.install "completions/paguro.fish"
      man1.install "man/paguro.1"
    end
  end

  service do
    run [opt_bin/"paguro", "serve"]
    keep_alive true
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/paguro --version")
    system bin/"paguro", "run", "--device", "cpu", "--max-tokens", "8", "Tell me a story about a shy fox"
  end
end
FORMULA
