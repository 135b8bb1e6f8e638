# Holds a pod's namespaces; catatonit is static.
FROM scratch
COPY catatonit /pause
CMD ["/pause", "-P"]
