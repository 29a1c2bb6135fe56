// Claims of one call without a Python object for each.
#pragma once

#include "bindings/ring_bindings.hpp" // first: Python.h sets macros of the system headers

#include <vector>

#include "bindings/owned_claim.hpp"

namespace transport::python {

void bind_received(nb::module_& module);
nb::object claimed_batch(nb::handle_t<Ring> ring, std::vector<OwnedClaim> claims);

}  // namespace transport::python
