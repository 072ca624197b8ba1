// The ids of the answers that this page has asked for, so that the engine's view can tell them from others'.

const ids = new Set();

export const remember = (id) => ids.add(id);

/** Of a request of the engine, whose id begins with its answer's. */
export const isMine = (requestId) => [...ids].some((id) => requestId.startsWith(id));
