#!/usr/bin/env bash
# Makes an image of a bare Debian (or Ubuntu) with the given packages, for hosts that reach no registry, and prints its
# reference: `debian_base.sh DPKG_CFG python3 tzdata`. DPKG_CFG says which files of packages are left out.
#
# The image has this host's release. mmdebstrap makes it with this host's own package sources, proxies and certificates.
# None of these get into the image: apt runs outside, and the image has no apt. At most one image a day is made for the
# same packages; those of earlier days lose their names.
set -euo pipefail

repository=remote-executor-debian

say() { printf '%s\n' "debian base: $*" >&2; }

for tool in mmdebstrap apt-get docker; do
    command -v "$tool" >/dev/null || { say "it takes $tool, which is not installed"; exit 1; }
done
(($# > 1)) || { say "which packages?"; exit 1; }
dpkg_cfg=$1
shift

. /etc/os-release
[[ ${ID:-} == debian || ${ID:-} == ubuntu ]] || { say "it takes a host that is Debian or Ubuntu"; exit 1; }

packages=$(printf '%s\n' "$@" | sort -u | paste -sd ,)
kind=$VERSION_CODENAME-$(cat - "$dpkg_cfg" <<<"$packages" | sha256sum | head -c 12)
image=$repository:$kind-$(date -u +%Y%m%d)

if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image"
    exit
fi

# The host's package sources for its own distribution, without any others.
origin=${ID^}
sources() {
    apt-get indextargets --format '$(ORIGIN)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        sed -n "s/^$origin|//p" | sort -u
}
[[ -n $(sources) ]] || apt-get update -q >&2
[[ -n $(sources) ]] || { say "apt of this host has no source of $origin"; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say "making $image: $packages"
apt-config dump Acquire::http Acquire::https >"$scratch/apt.conf"
# The hook merges /usr from the start; otherwise a package does so that needs the whole of Perl.
mmdebstrap --variant=essential --format=tar --include="$packages" \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt="$dpkg_cfg" \
    --aptopt="$scratch/apt.conf" \
    --customize-hook='rm -rf "$1"/etc/apt/sources.list* "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/var/log/*.log' \
    --customize-hook='echo localhost > "$1"/etc/hostname; : > "$1"/etc/resolv.conf' \
    "$VERSION_CODENAME" "$scratch/root.tar" - < <(sources) >"$scratch/log" 2>&1 ||
    { tail -n 40 "$scratch/log" >&2; say "mmdebstrap failed"; exit 1; }
docker import "$scratch/root.tar" "$image" >/dev/null

docker images --format '{{.Repository}}:{{.Tag}}' "$repository" |
    while read -r other; do
        [[ $other == *-"${image##*-}" ]] || docker rmi --no-prune "$other" >/dev/null
    done
echo "$image"
